"""forerun's own measurements."""
