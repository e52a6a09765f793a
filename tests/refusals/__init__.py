"""Bad inputs, by topic, and the whole message of each."""
