"""Reports as the terminal and the page show them."""
