"""What ``rollpack report`` shows: the numbers, their plots and the page. Only the last two need the extra ``report``."""
