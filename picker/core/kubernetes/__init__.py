"""What the Kubernetes API says, and what that makes of endpoints. No sockets, no clock."""
