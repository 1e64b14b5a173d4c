"""The forms that :func:`tigon.apply` recognises: modules and rotary functions, as models write them.

A module or function is recognised when its canonical expression (`../canonical.py`) equals that of a row of a
table, never by its name. The attribute names of a row are roles: the match says which attribute of the real
module plays each. Rows also serve the numeric probe of functions that have no source. To add a structure,
write its row: a name, a function, and what the replacement needs to know. A canonical expression sees through
functions, so that what several rows share stands in one, and does not count how often a value is written.
"""
