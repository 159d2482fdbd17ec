"""Patients, findings and anatomy of the phantom."""
