"""Files in a folder or at a URL, behind one interface."""
