"""Reports of runs: definitions of metrics, terminal displays, plots, the HTML page."""
