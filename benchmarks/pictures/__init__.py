"""The pictures of the pages: SVG in the colours of the reader's theme, with text that can be read
on a phone.
"""
