"""The page of a store."""
