"""The templates of the report, and what they call: figures in words, rows in sections."""
