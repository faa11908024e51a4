"""The history of all devices: results of every commit read once, change points, and the site that shows them."""
