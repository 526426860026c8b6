"""The course as a site: sources put together from the repository, a Sphinx configuration, and what a page needs."""
