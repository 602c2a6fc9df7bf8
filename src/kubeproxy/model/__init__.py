"""What the objects mean, pure: no clock, no socket, no subprocess, no logging."""
