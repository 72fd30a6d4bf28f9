"""Work past one process: parcels for other processes, and many fits on a Ray cluster. Nothing else imports ray.

What runs there is in `inference`: the executors hand work over, and get results back.
"""
