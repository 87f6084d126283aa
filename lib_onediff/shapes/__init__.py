"""What makes two calls the same shape (key), and what is known of each shape (table)? Imports model/ and ops/."""
