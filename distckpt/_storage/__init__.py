"""Where bytes lie: local files and object stores behind one set of functions."""
