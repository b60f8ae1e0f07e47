"""The device thread: its loop, admission, settling, pace, and the runtime that owns one loaded model."""
