"""Live parity with the installed peers; a package, so that its file names may be those of the rooms' tests."""
