"""Ways to spend angles, and the table that is looked up instead. Siblings do not import each other."""
