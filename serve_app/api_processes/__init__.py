"""What the API processes of one server share (which live, what is open, what was counted), and how
requests reach each of them."""
