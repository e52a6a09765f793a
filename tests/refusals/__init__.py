"""Bad inputs, by topic, and what the message of each must say."""
