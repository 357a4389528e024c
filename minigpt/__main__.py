"""python -m minigpt"""

from minigpt.cli import program

if __name__ == "__main__":  # not in a process that it starts
    program()
