"""The plugins that ship with the picker, one file each; `registry` gives them their configuration names."""
