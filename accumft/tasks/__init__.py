"""What belongs to one task: checks of its fields, its loss, its evaluation, its report."""
