"""How fast is it, against whom, and how far from what the machine allows?

Nothing is imported here: a contestant's process, which begins with this, is to hold nothing before it is measured.
"""
