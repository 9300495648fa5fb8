"""pico's function in the 27B's shape: true tokens and true acceptance at the cost of a 27B step."""
