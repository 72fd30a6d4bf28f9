"""`posterity penalty`: the prior of a penalty, by name or formula."""
