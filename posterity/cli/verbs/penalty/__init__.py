"""`posterity penalty`: `words` reads what was asked, `reading` and `networks` answer, `command` prints.

What penalties are and do is in `penalties`; their figures are in `report.penalties`.
"""
