"""report.html: what runs were, as one page that needs nothing beside it."""
