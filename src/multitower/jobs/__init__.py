"""The built-in jobs, one module each; `multitower.job` finds them by module name and runs them like a user's file."""
