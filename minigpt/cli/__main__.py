"""python -m minigpt.cli"""

from minigpt.cli import main

main()
