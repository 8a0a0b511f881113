"""The benchmark behind `distckpt bench`: saves and loads beside the raw storage and beside other libraries.

`state` makes what is saved, `contestants` are the ways to save and load it, `rounds` measures them in turn on several
ranks, `run` starts the ranks and puts everything away, `report` and `picture` show what came out.
"""
