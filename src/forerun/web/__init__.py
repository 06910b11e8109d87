"""The same answers over HTTP, and one page to play with them."""
