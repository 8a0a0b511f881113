"""Pages of HTML that the command line writes."""
