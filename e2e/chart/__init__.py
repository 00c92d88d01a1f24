"""Files that are made from the chart, and how they are checked."""
