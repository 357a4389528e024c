"""python -m minigpt"""

from minigpt.cli import main

main()
