"""The functions that run one job in a child process, and the table of them."""
