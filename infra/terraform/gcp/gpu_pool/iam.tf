# What a node may do: read the artifact's bucket and its own secrets.

resource "google_service_account" "node" {
  project      = var.project
  account_id   = "${var.name}-node"
  display_name = "Nodes of the sllm pool ${var.name}"
}

resource "google_storage_bucket_iam_member" "node" {
  bucket = var.bucket
  role   = "roles/storage.objectViewer"
  member = google_service_account.node.member
}

resource "google_secret_manager_secret_iam_member" "node" {
  for_each = toset(concat(
    ["nats-ca", "node-key", "node-peer-token"],
    var.storage_key ? ["node-storage-id", "node-storage-key"] : [],
  ))

  project   = var.project
  secret_id = "${var.secret_prefix}-${each.key}"
  role      = "roles/secretmanager.secretAccessor"
  member    = google_service_account.node.member
}
