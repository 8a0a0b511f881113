"""Local files, object stores and other URLs behind one set of functions."""
