"""Reference pages that are made from code: the HTTP interfaces, the operator's settings."""
