"""Objects and their plans. Pure: no clock, no socket, no subprocess, no logging."""
