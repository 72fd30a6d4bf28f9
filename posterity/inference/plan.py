def plan():
    pass
