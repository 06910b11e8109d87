"""The server: the answers of the command line over HTTP, and the what-if page."""
