"""What the terminal and the page show."""
