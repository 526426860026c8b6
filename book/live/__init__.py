"""What runs in the reader's browser: the course's own modules, by Pyodide, behind a page of its own."""
