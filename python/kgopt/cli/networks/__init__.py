"""``bench --suite zoo``: networks of users, and drawn ones, that no kernel was tuned on.

``network`` says what an entry is, ``of_*`` are the tables, a file a library, ``drawn`` draws from the fuzz's grammar.
``ways`` makes of a network what is measured, ``case`` measures it, ``worker`` is the process that does so, ``suite``
starts workers and keeps their rows, ``summary`` draws the table.
"""
