"""The training side of clawpipe: everything with torch."""
