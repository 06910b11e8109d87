"""Other frameworks, file formats and clusters, found through entry points."""
