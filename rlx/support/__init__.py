"""What every folder may use: settings, files, dataclasses, optional libraries, name suggestions."""
