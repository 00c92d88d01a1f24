"""The page that says which versions of what were run for real, made from what was recorded when they ran."""
