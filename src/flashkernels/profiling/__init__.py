"""Where the time goes and what the machine would allow: profiles, rooflines, reports."""
