"""The `stream` engine: see `engine`."""
