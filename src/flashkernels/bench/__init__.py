"""Times the ops of this package beside their rivals, after checking that each of them is right."""
