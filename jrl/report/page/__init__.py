"""report.html: runs as one self-contained page."""
