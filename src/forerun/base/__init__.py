"""Parts that every room uses: errors, units, answers as JSON, caches, tables, plugins and supervised children."""
